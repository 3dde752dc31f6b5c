// Per-row arithmetic shared by all backends (host and device inline): first value of a row, first optimizer state, update rules.
// The same expressions in the same order everywhere, compiled without contraction: bits do not depend on the backend.
#ifndef HVD_CTR_CORE_ROW_MATH_H_
#define HVD_CTR_CORE_ROW_MATH_H_
// Filled in with cpu_backend; the contract:
//   int32_t StateFloats(const RowOptimizerOptions&, int32_t dim)         Sgd 0; Adagrad D; RowWiseAdagrad 1; Adam 2D (+1 with row_step); Ftrl 2D
//   void InitialRow(const InitializerOptions&, uint64_t seed, uint64_t table_hash, int64_t id, int32_t dim, float* row)
//        table_hash = HashBytes(table name): independent of the table's position in the config
//   void InitialState(const RowOptimizerOptions&, int32_t dim, float* state)
//   void UpdateRow(const RowOptimizerOptions&, int64_t step, float learning_rate, const float* gradient, int32_t dim, float* row, float* state)
#endif  // HVD_CTR_CORE_ROW_MATH_H_
