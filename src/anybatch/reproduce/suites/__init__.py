"""Sets of experiments: the laptop suite and the published Procgen configurations."""
