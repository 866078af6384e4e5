"""From names and command-line overrides to a built Job; the only part of the package, beside main, that knows Fiddle."""
