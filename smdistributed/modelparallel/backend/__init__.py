"""Names that launchers search for."""
