"""The process: environment first, then the command line; a user's mistake is a sentence, a bug is a traceback."""

from __future__ import annotations

import os
import sys
import traceback


def main() -> int:
    """Run the command line and return its exit code; usage errors of the parser exit with 2 by themselves."""
    # Two OpenMP threads beside another busy process spin and cost 8×; only what is set before torch is imported counts.
    os.environ.setdefault("OMP_WAIT_POLICY", "passive")
    from pabench.cli.app import app

    try:
        app(prog_name="pabench")
    except BaseException as error:
        if isinstance(error, SystemExit | KeyboardInterrupt):
            raise
        traceback.print_exc()
        print("error: this is a bug in pabench; please report it with the traceback above", file=sys.stderr)
        return 4
    return 0


if __name__ == "__main__":
    sys.exit(main())
