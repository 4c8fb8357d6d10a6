"""The only orchestrator: Suite → cases → checks → records. Kernels run in child processes; a crash costs one case."""

from pabench.runner.options import FinishedRun, RunOptions, Watcher
from pabench.runner.run import run_suite

__all__ = ["FinishedRun", "RunOptions", "Watcher", "run_suite"]
