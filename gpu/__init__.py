"""`make gpu`: one self-contained acceptance run of engine, trainer and publication on a GPU."""
