"""Facts: chips, links, nodes, clusters and their topology."""
