"""What trains the runs of a study: threads of this process, or tasks on a Ray cluster."""
