"""jadore801120: attention-is-all-you-need-pytorch, with its class's defaults."""
