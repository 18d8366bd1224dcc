"""What runs inside the sandbox. Standard library only: this folder is all of Lagoon that is mounted there."""
