"""Numbers that are wrong: counted, named, compared. What decides what to do about them is the trainer.

finding.py    what is wrong: layer, operand, rank, step, forward or backward
state.py      weights, moments and scales that are not finite or not plausible
passing.py    every tensor that passes a module, to somebody who looks
witness.py    the first of them that is not finite
digest.py     the bits of a tensor as one number
replay.py     two runs of a microbatch, bit for bit
replicas.py   what several ranks hold the same of, and who differs
"""
