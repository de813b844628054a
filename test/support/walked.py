"""Prints the files of the package that an iteration enters, or the modules that a run loads.

python -P test/support/walked.py '{"recipe": "vmas_balance_mappo", "execution": "eager"}'

It runs in a separate process, since modules of other tests would be counted otherwise.
"""

import json
import sys
import tempfile
from pathlib import Path

import torchrl_marl

PACKAGE = Path(torchrl_marl.__file__).resolve().parent


class CallRecorder:
    """Records the files of the package whose functions are called, in total and in ``learn``."""

    def __init__(self):
        self.files, self.learning = set(), set()

    def __call__(self, frame, event, _):
        name = frame.f_code.co_filename
        if event == "call" and name.startswith(f"{PACKAGE}/"):
            file = name.removeprefix(f"{PACKAGE}/")
            self.files.add(file)
            if any(is_learn(caller) for caller in callers(frame)):
                self.learning.add(file)


def callers(frame):
    """A frame and its callers."""
    while frame is not None:
        yield frame
        frame = frame.f_back


def is_learn(frame):
    """Whether a frame belongs to a learner's ``learn``."""
    code = frame.f_code
    return code.co_name == "learn" and code.co_filename.startswith(f"{PACKAGE}/learners/")


def files_of_an_iteration(recipe, **overrides):
    """The files that the second iteration enters, in total and within ``learn``."""
    recorder = CallRecorder()
    with tempfile.TemporaryDirectory() as folder:
        steps = torchrl_marl.iterate(recipe, folder=f"{folder}/run", **overrides)
        next(steps)
        sys.settrace(recorder)
        next(steps)
        sys.settrace(None)
        for _ in steps:
            pass
    return {"files": sorted(recorder.files), "learning": sorted(recorder.learning)}


def modules_of_a_run(recipe, **overrides):
    """The modules of the package that a whole run loads."""
    with tempfile.TemporaryDirectory() as folder:
        torchrl_marl.train(recipe, folder=f"{folder}/run", **overrides)
    return sorted(name for name in sys.modules if name.partition(".")[0] == "torchrl_marl")


if __name__ == "__main__":
    settings = json.loads(sys.argv[1])
    whole_run = settings.pop("whole")
    print(
        json.dumps(modules_of_a_run(**settings) if whole_run else files_of_an_iteration(**settings))
    )
