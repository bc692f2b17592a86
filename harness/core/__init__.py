"""The words of the house: frozen values that every other part exchanges. Standard library only."""
