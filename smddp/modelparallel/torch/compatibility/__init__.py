"""Names that scripts for the original library use, and that do little or nothing here."""
