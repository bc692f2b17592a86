"""Pictures as SVG that trainers and reports both draw. Standard library only; what is drawn is decided elsewhere."""
