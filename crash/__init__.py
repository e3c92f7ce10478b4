"""`make crash`: kills every process of a real deployment at every named point, and judges from outside what is left.

    kills.py        what is killed, where, in which deployments, and what has to happen so that the point is reached
    deployment.py   `reef serve` as a process: armed with a plan, killed, watched, started again
    disk.py         the same on a small file system of its own, which is full at a named point or at any moment
    clock.py        the same with a clock that jumps
    load.py         clients that talk to it all the while, and remember every acknowledgement
    audit.py        the invariants, asked over HTTP
    rescore.py      recorded log-probabilities against transformers and peft
    run.py          one deployment through its kills
    misfortune.py   a second service, a clock that jumps back, a damaged marker
    report.py       a line for each kill, a file for each session, the report

Nothing here is part of the wheel.
"""
