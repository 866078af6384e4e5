"""From names and command-line overrides to a built Job; beside main and experiments, only this knows Fiddle."""
