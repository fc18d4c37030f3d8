"""The drawings of the tutorial and of other documents, each in English and in Chinese."""
