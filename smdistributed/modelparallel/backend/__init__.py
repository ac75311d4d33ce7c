"""What launchers look for."""
