"""The functions that a script calls on `smp`; `smddp.modelparallel.torch` lists all names."""
