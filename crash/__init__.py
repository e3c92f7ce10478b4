"""`make crash`: kills every process of a real deployment at every named point, and judges from outside what is left.

    kills.py        what is killed, where, and what has to happen so that the point is reached
    deployment.py   `reef serve` as a process: armed with a plan, killed, watched, started again
    load.py         clients that talk to it all the while, and remember every acknowledgement
    audit.py        the invariants, asked over HTTP
    rescore.py      recorded log-probabilities against transformers and peft
    run.py          one deployment through its kills; the report

Nothing here is part of the wheel.
"""
