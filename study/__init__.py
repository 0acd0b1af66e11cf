"""The study of the Path-SGD paper: `python -m study` runs it, `study.api` has the same for Python."""
