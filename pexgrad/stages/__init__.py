"""From a graph to the factors of a call: each stage knows earlier ones by what they return; `pexgrad.pipeline` calls them."""
