"""Benchmarks of shmacc against its peers, written against the public API alone.

Read `workload` (what is applied), `operations` (what is timed), `peers` (the competitors),
`runner` (how it is interleaved), `targets` (what is to be reached) and `report` in that order.
"""
