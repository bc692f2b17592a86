"""SVG pictures for both trainers and reports. Standard library only; callers decide what is drawn."""
