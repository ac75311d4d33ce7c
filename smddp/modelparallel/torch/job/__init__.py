"""What `smp.init` makes, once per process: configuration, place of this rank, process groups."""
