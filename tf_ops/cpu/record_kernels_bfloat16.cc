// The loops over records with bfloat16 rows; a file of its own, so that it compiles beside the others.
#include "tf_ops/cpu/record_loops.h"

namespace hvd_ctr {

template class RecordLoops<Bfloat16Rows>;

}  // namespace hvd_ctr
