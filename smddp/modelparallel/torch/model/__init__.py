"""`smp.DistributedModel`, its internal part (`ModelRuntime`), and its state dicts."""
