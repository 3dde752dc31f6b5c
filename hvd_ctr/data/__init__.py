"""Reading samples from Criteo text and Parquet files, dealt to ranks by row; synthetic data with a known teacher."""

from hvd_ctr.data.batch import Batch
from hvd_ctr.data.files import open_reader
from hvd_ctr.data.reader import Reader

__all__ = ["Batch", "Reader", "open_reader"]
