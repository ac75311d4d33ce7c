"""`smp.DistributedModel`, what works behind it, and its state dicts."""
