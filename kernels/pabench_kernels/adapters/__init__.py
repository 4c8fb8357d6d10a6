"""Other people's kernels, one adapter a file. Each imports its library only when a batch is asked of it."""
