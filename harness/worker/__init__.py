"""What runs on a rank. The standard library, torch and the subject's own library; nothing else."""
