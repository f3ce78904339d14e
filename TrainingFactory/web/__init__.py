"""The web page over what is on disk: `tfactory ui`. No torch in its process; see docs/UI.md."""
