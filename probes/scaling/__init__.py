"""Scaling laws with honest uncertainty: L(N, D) = a N^-alpha + b D^-beta (+ c), fitted, tested, doubted.

    found = fit(n, d, loss)                         # Huber on log L, many starts, tight optimum, no bounds by default
    found.parameters["alpha"], found.warnings       # what the points do not determine is said
    found.r2(n_held_out, d_held_out, loss_held_out)
    profile(found, "alpha").interval                # profile likelihood
    bootstrap(found).interval()                     # other points of the same kind
    fit_joint(n, d, loss, architecture).verdict     # shared N term, shared D term, one law or none in common

n: parameters without embeddings; d: training tokens; loss: nats (validation loss or log(LongPPL)). `fit_released` and
RELEASED_BOUNDS are the released fit of arXiv:2606.15378, for comparison.
"""

from probes.scaling.fitting import Fit, fit
from probes.scaling.joint import JointFit, JointLaw, fit_joint
from probes.scaling.law import predict
from probes.scaling.profiling import Profile, profile
from probes.scaling.released import RELEASED_BOUNDS, fit_released
from probes.scaling.resampling import Bootstrap, bootstrap

__all__ = [
    "RELEASED_BOUNDS",
    "Bootstrap",
    "Fit",
    "JointFit",
    "JointLaw",
    "Profile",
    "bootstrap",
    "fit",
    "fit_joint",
    "fit_released",
    "predict",
    "profile",
]
