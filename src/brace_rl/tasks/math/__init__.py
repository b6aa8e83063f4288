"""The mathematics family: competition problems with real models, and generated arithmetic for small ones.

::

    data.py         files of problems in the public formats -> checked problems
    extract.py      response -> the answer it ends on
    numerals.py     how numbers are written -> exact values
    units.py        words after a number -> a unit, or part of the answer
    normalize.py    spellings of one answer -> one spelling
    equivalence.py  two answers -> the same? At once where numbers and words decide, else through math-verify
    workers.py      math-verify in processes of its own, each answer with a limit of time and memory
    scoring.py      the verifier that joins these, and the penalty for overlong responses
    task.py         MathTask: real data, any model
    arithmetic.py   ArithmeticStepsTask: the embedded form
"""
