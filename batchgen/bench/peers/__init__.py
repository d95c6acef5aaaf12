"""What batchgen is compared with, each run in a process of its own:

    python -m batchgen.bench.peers.<module> WORK.json RESULT.json

The modules use the standard library and their peer alone, so that a virtual environment without batchgen's own
dependencies can run them. WORK.json is `work.Work`, RESULT.json `work.Result`. The exit status is 69, with one sentence
on stderr, where the peer is not installed or cannot do this work here.
"""
