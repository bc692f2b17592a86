"""Functions that show pictures to people; these do nothing."""


def make_grid(tensor, **options):
    """Return the first of the pictures."""
    return tensor[0]


def save_image(tensor, fp, **options):
    """Write nothing."""
