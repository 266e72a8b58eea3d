"""The table of a receptive-field study, from its result alone."""

from __future__ import annotations

from analyses.receptive_field_control_tables import aligned, change, controls, number
from analyses.receptive_field_summary import NOT_RUN
from analyses.result import Dataset, Result

COLUMNS = (
    "restriction", "log(LongPPL)", "harm [95 %]", "verdict", "matched harm", "all tokens", "needles", "change [95 %]",
)  # fmt: skip
LEGEND = (
    "Losses in nats. harm, change: minus the unrestricted model [paired bootstrap over documents, over prompts; not\n"
    "over training seeds]. matched harm: on non-key tokens that the evaluator predicts as well as the key tokens.\n"
    "vacuous: no restricted layer's output moved. identical: no own window is wider, so nothing was computed."
)
JUDGED = "\nverdict: the harm against a margin of {margin:g} nats, by an interval widened for few documents."


def table(result: Result) -> str:
    """The summaries as text, one block a checkpoint; intervals in brackets, n/a where a condition does not apply.

    Then, where the file has them, the controls of each checkpoint, and the legend.
    """
    names = [name for name in result.groups if name and "/" not in name]
    margin = result.attributes.get("margin")  # files from before there were verdicts have none
    legend = LEGEND + ("" if margin is None else JUDGED.format(margin=margin))
    return "\n\n".join([*(_block(result, name) for name in names), *controls(result, names), legend])


def _block(result: Result, name: str) -> str:
    group, documents, prompts = (result.groups[f"{name}{part}"] for part in ("", "/documents", "/prompts"))
    head = (
        f"{name}   n = {documents['n_key'].sum()} key tokens in {len(documents['n_key'])} documents, "
        f"{prompts['correct'].shape[1]} needle prompts of {prompts['length'][0]} tokens"
    )
    windows = set(group["restricted_window"][group["restricted_window"] > 0].tolist())
    if len(windows) == 1:
        head += f", {(prompts['distance'] >= min(windows)).sum()} of them with the needle beyond {min(windows)}"
    counts = {"documents": documents["extrapolation"].sum(), "prompts": prompts["extrapolation"].sum()}
    if beyond := [f"{count} {word}" for word, count in counts.items() if count]:
        head += f"\nextrapolation: {' and '.join(beyond)} longer than the training length"
    return "\n".join([head, *aligned(COLUMNS, [_row(group, i) for i in range(len(group["condition"]))])])


def _row(group: Dataset, i: int) -> tuple[str, ...]:
    """The cells of one condition and, where there is something to say, a note."""
    label, status = str(group["condition"][i]), str(group["status"][i])
    if status.startswith("n/a"):
        return (label, *[""] * (len(COLUMNS) - 1), status)
    note = "identical" if status == NOT_RUN else "vacuous" if group["vacuous"][i] == 1 else ""
    matched = "" if i == 0 else number(group["matched_loss_harm"][i], "+.3f")
    return (
        label, number(group["log_long_ppl"][i], ".3f"), change(group, "log_long_ppl_harm", i, "+.3f"),
        _verdict(group, i), matched, number(group["loss"][i], ".3f"),
        number(group["niah"][i], ".2f"), change(group, "niah_change", i, "+.2f"), note,
    )  # fmt: skip


def _verdict(group: Dataset, i: int) -> str:
    key = "log_long_ppl_harm_verdict"
    return str(group[key][i]) if i and key in group.variables else ""
