"""The error for a caller's mistake: printed as one line by the command line, exit code 2."""


class InputError(ValueError):
    """Bad input: the message names the object, the value found, the value expected and the remedy."""
