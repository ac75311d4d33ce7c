"""The functions that a script calls on `smp`; `smddp.modelparallel` lists all public names."""
