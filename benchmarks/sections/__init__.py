"""The sections of ``one_program.py``: each measures one part of training."""
