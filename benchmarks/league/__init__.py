"""The league: optimizers at their best on networks of three sets, by a protocol that was written down first.

    python -m benchmarks.league pack FOLDER DATA
    python -m benchmarks.league run search OUT --networks seen --methods adamw muon --data DATA --workers 14
    python -m benchmarks.league run seeds OUT --networks seen --methods adamw muon balanced-muon --data DATA
    python -m benchmarks.league table

PROTOCOL.md says what is run and how it is compared. networks and tasks, methods -> train (one job) -> run
(many jobs on one GPU) -> records; plan says which jobs a stage has, search what a search tries next.
"""
