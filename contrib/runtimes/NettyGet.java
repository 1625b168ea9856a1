import io.netty.bootstrap.Bootstrap;
import io.netty.buffer.ByteBuf;
import io.netty.buffer.Unpooled;
import io.netty.channel.Channel;
import io.netty.channel.ChannelHandlerContext;
import io.netty.channel.ChannelInitializer;
import io.netty.channel.SimpleChannelInboundHandler;
import io.netty.channel.epoll.EpollEventLoopGroup;
import io.netty.channel.epoll.EpollSocketChannel;
import io.netty.channel.unix.IntegerUnixChannelOption;
import java.nio.charset.StandardCharsets;

/**
 * Gets a page COUNT times with Netty: java -cp JARS NettyGet.java URL COUNT [option]. With `option` its sockets have IP_LOCAL_PORT_RANGE.
 * Prints requests, failures and seconds, without a first tenth.
 */
public class NettyGet {
    /** IP_LOCAL_PORT_RANGE: level SOL_IP, option 51. */
    static final IntegerUnixChannelOption LOCAL_PORT_RANGE = new IntegerUnixChannelOption("IP_LOCAL_PORT_RANGE", 0, 51);

    static class Reader extends SimpleChannelInboundHandler<ByteBuf> {
        @Override
        public void channelRead0(ChannelHandlerContext context, ByteBuf page) {}
    }

    public static void main(String[] arguments) throws Exception {
        java.net.URI url = java.net.URI.create(arguments[0]);
        int count = Integer.parseInt(arguments[1]);
        byte[] request = "GET / HTTP/1.0\r\n\r\n".getBytes(StandardCharsets.US_ASCII);
        EpollEventLoopGroup group = new EpollEventLoopGroup(1);
        Bootstrap bootstrap = new Bootstrap().group(group).channel(EpollSocketChannel.class);
        bootstrap.handler(new ChannelInitializer<Channel>() {
            @Override
            protected void initChannel(Channel channel) {
                channel.pipeline().addLast(new Reader());
            }
        });
        if (arguments.length > 2) {
            // The whole range, searched port by port.
            bootstrap.option(LOCAL_PORT_RANGE, 0xFFFF0000);
        }
        long began = 0;
        int failed = 0;
        for (int number = -(count / 10); number < count; number++) {
            if (number == 0) {
                began = System.nanoTime();
                failed = 0;
            }
            try {
                Channel channel = bootstrap.connect(url.getHost(), url.getPort()).sync().channel();
                channel.writeAndFlush(Unpooled.wrappedBuffer(request)).sync();
                // The server closes.
                channel.closeFuture().sync();
            } catch (Exception error) {
                failed++;
            }
        }
        System.out.println(count + " " + failed + " " + (System.nanoTime() - began) / 1e9);
        System.exit(0);
    }
}
