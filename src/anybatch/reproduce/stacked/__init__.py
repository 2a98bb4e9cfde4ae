"""Many runs in one program: an accelerator for small networks at small batches, which runs the single-run algorithm.

R runs that differ in numbers alone are trained with a leading run axis: one EnvPool of R*N environments, batched
products over stacked weights, one backward pass of the sum of their losses. Shapes are those of the single-run code
with R in front: (R, N, T) for a rollout, (R, B) for a minibatch, (R, P) for the parameters of a network.
"""

from anybatch.reproduce.evaluations import Evaluations
from anybatch.reproduce.stacked.launcher import launch
from anybatch.reproduce.stacked.results import read_result, result_path, write_result
from anybatch.reproduce.stacked.shapes import shape_key
from anybatch.reproduce.stacked.stack import RunResult, run_stacked

__all__ = [
    "Evaluations",
    "RunResult",
    "launch",
    "read_result",
    "result_path",
    "run_stacked",
    "shape_key",
    "write_result",
]
