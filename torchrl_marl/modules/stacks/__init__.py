"""Module stacks: the modules of many agents as one module.

``building`` makes them, ``module_stack`` is what one gets, ``door`` reads and writes TensorDicts.
Below: ``storage`` holds the parameters, ``routing`` brings agents to members, ``execution``
chooses how a structure runs, ``matmul`` and ``gradient`` run perceptrons.
"""
