"""Graph and Cluster in, Plan out: the best division within the stated space, with its proof."""
