"""What every program needs and no experiment is about: files, processes, child processes, the I/O event loop."""
