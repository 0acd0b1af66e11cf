"""Does one learning rate train every network?

    python -m benchmarks.transfer pack CIFAR_FOLDER DATA              # if the images have to travel
    python -m benchmarks.transfer plan rates jobs.json
    python -m benchmarks.transfer run jobs.json OUT --data DATA --workers 14
    cat OUT/records.jsonl >> results/transfer/records.jsonl           # the next stage starts from these
    python -m benchmarks.transfer plan seeds jobs.json                # also: around-default, rebalanced
    python -m benchmarks.transfer table
    python -m benchmarks.transfer figure
    python -m benchmarks.transfer summary OUT                         # of the stage balance

networks and tasks, methods -> train (one job) -> run (many jobs on one GPU) -> records -> table, verdicts,
figure, summary. plan writes jobs, pack the images. Records of removed optimizers can be read, not run again.
"""
