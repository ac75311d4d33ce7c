"""The PyTorch side of `smdistributed.dataparallel`."""
