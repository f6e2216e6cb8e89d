"""Adapters of a page each, through which other programs run a bundle. Each needs the package that it is named after."""
