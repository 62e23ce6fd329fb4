"""`make bench`: Onefold, the raw drivers and the other libraries of the field, on the same servers in one run.

`contests` says who takes part, `run` and `throughput` measure, `spread` computes, `bars` judges; `page` and `charts`
make `docs/benchmarks/` from the results alone.
"""
