"""From recorded runs to statistics, tables and the verdicts on the claims of the paper."""
