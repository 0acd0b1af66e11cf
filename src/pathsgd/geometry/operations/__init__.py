"""What each operation of a path graph does to path weights."""
