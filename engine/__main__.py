"""Run federations one after another in the same warm process, for ``results.engines``.

Each line of the input is a job as JSON: ``values`` (the whole run config), ``federation`` (texts of
``--federation-config``), ``part`` (of this machine: see ``common.resources``) and ``log`` (where the run's log goes).
Each is answered by a line with the exit code.
"""

import json
import logging
import os
import sys

from common.durable import open_descriptor
from common.errors import FloretError
from common.flower import format_log
from common.imports import quick_imports
from common.registry import load_modules

with quick_imports():
    from engine.plan import Plan
    from engine.supervisor import WRONG, prepare, run

    # All runs of this process have the code of its start, which results name, whatever is committed meanwhile.
    for package in ("strategies", "client_app.methods"):
        load_modules(package)

log = logging.getLogger("flwr")


def main() -> None:
    """Run the jobs of the standard input to its end."""
    answers = os.fdopen(os.dup(1), "w", buffering=1)
    for line in sys.stdin:
        job = json.loads(line)
        file = open_descriptor(job["log"], os.O_WRONLY | os.O_CREAT | os.O_TRUNC)
        os.dup2(file, 1)
        os.dup2(file, 2)
        os.close(file)
        format_log()
        try:
            plan = Plan.of(job["values"], job["federation"], tuple(job["part"]))
            prepare(plan)
        except FloretError as error:
            log.error("%s", error)
            code = WRONG
        else:
            code = run(plan)
        try:
            answers.write(f"{code}\n")
        except BrokenPipeError:  # whoever wanted it has ended
            return


if __name__ == "__main__":
    main()
