// Chapter 2: mirror an image: in each row, the columns come in reverse order.
// 第 2 章：左右翻转一幅图像：每一行里，列的次序颠倒。
//
// The image has `rows` rows of `columns` pixels, one row after the other. Blocks are 32 x 8, columns run along x.
// 图像按行存放，共 rows 行，每行 columns 个像素。线程块为 32 x 8，列沿 x 方向。
//
// Check it with / 检查：  warpbus learn 02.2 --check

__global__ void mirror(const unsigned char *image, unsigned char *mirrored, int rows, int columns) {
    // mirrored[row][column] = image[row][?]
}
