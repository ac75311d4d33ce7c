"""The transformer family of `smp.nn`: layers, and models, that tensor parallelism divides."""
